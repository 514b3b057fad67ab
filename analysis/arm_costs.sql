-- What each arm costs: points of accuracy over all tasks, with their 95 % intervals.
select arm, difference, low, high, p_value
from arm_comparison
where task = '(all)'
order by difference
