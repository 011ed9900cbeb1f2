"""Models of an application, and what turns a body into requests of the engine."""
