"""A study: how many heads can go, how much cache can go, and the files."""
