-- The least active heads: the lowest output norms, and the share of sequences on which each head is inactive.
select layer, head, output_norm_ln, output_norm_ln_inactive
from head_summary
order by output_norm_ln
limit 10
