"""The tape: what enters a scheduler, without any text. `cluster/lab/tape/` runs the scheduler over it again."""
