"""What a simulated or recorded cluster costs."""
