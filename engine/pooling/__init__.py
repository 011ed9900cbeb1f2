"""What is asked of an engine for embeddings and scores: from texts to token ids."""
