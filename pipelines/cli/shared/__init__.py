"""Options that several verbs share, and the types of arguments."""
