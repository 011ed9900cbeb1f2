"""What the prefix cache has, for routers that are not ours."""
