"""Features at the HTTP edge, a folder each; `table.py` lists them in order."""
