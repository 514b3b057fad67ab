"""Ray: sessions, actors, heartbeats and restarts."""
