-- The runs of a store, newest first, and the version of headscan that made each.
select run_id, kind, model, corpus, status, code_version, started_at
from runs
order by started_at desc
