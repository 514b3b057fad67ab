-- Heads that change most between texts.
select layer, head, output_norm_std / output_norm as variation
from head_summary
order by variation desc
limit 10
