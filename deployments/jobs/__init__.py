"""Work that outlives its client: a record, a lease and a log for each request whose answer is kept."""
