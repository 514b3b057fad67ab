-- Questions that the baseline answers and an arm does not.
select a.task, a.question, a.doc_hash
from answers a join arms x using (arm_id), answers b join arms y using (arm_id)
where y.name = 'baseline' and x.run_id = y.run_id and x.name <> 'baseline'
  and a.task = b.task and a.question = b.question and b.correct = 1 and a.correct = 0
