"""KV caches of models whose layers are not alike: a manager for each kind of group, and one over all groups."""
