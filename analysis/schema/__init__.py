"""Tables, views and macros of a store, declared as data."""
