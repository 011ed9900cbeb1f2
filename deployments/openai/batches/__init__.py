"""OpenAI's Files and Batch API: requests from a file, answered when engines have time for them."""
