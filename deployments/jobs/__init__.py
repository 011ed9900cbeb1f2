"""Work that outlives its client: one record, one lease and one log for a request whose answer is kept."""
