"""OpenAI's Files and Batch API: requests from a file, answered when the engines have time."""
