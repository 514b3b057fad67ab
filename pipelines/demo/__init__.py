"""The bundled demo: a small trained decoder, a task it can do, and the whole pipeline run on both."""
