-- The texts on which a head is most active. Set its layer and its number.
select s.source, h.output_norm
from head_statistics h join sequences s using (run_id, sequence)
where h.layer = 0 and h.head = 1
order by h.output_norm desc
limit 5
