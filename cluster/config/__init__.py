"""Section `args` of serve_config.yaml, parsed strictly and converted to the frozen objects that each folder defines."""
