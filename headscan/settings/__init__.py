"""Settings with options, defaults and help, which load no library.

`corpus_settings` for texts, `measure_settings` for scans, probes, importance and gates, `evaluation_settings` for
tasks and arms, `saving_settings` for plans and prunings. `settings_file` reads them from YAML or JSON.
"""
