-- Heads that attend to the first token.
select layer, head, first_token_weight, entropy
from head_summary
where first_token_weight > 0.5
order by first_token_weight desc
