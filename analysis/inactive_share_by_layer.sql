-- The share of inactive heads by layer.
select layer, avg(output_norm_ln_inactive) as inactive
from head_summary
group by layer
order by layer
