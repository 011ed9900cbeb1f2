"""The files of a model: where they are, the small ones of JSON, and other files in their place."""
