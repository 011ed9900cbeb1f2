"""What serving never imports: the simulator, planning, tuning, replays of tapes, and the recomputation of answers."""
