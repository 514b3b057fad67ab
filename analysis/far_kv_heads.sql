-- KV heads whose group looks far back. A KV head needs its cache if one of its query heads does.
select layer, kv_head, max(distant_mass) as most, count(*) as query_heads
from head_summary
group by layer, kv_head
order by most desc
