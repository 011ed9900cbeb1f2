"""The tape: what enters a scheduler, without any text, and how to run the scheduler over it again."""
