"""Parts of a model's configuration, each read from config.json."""
