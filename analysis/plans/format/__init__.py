"""Records of a head plan, its file and its JSON schema."""
