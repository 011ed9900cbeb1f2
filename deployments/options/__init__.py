"""Options of an application that are those of one part."""
