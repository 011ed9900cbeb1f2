"""The files of a model: where they are, the small ones of JSON, and files that replace them."""
