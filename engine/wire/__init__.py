"""Types that cross a process boundary: messages, plans, parameters, hashes."""
