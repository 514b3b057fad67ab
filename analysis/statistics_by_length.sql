-- A statistic by the length of the sequence, in steps of 64 tokens.
select s.tokens // 64 * 64 as tokens, avg(h.entropy) as entropy, count(distinct s.sequence) as sequences
from head_statistics h join sequences s using (run_id, sequence)
group by 1
order by 1
