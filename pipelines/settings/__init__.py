"""Settings of every job: its options, their defaults and help. Importing them loads no library."""
