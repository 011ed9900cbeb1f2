"""The files of a model: finding its folder, reading its JSON files, and replacing some of them."""
