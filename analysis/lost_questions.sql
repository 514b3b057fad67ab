-- Questions that an arm answers worse than the baseline, the largest losses first; partial credit counts.
select x.name as arm, a.task, a.question, b.correct as before, a.correct as correct, a.doc_hash
from answers a join arms x using (arm_id), answers b join arms y using (arm_id)
where y.name = 'baseline' and x.run_id = y.run_id and x.name <> 'baseline'
  and a.task = b.task and a.question = b.question and a.correct < b.correct
order by b.correct - a.correct desc, arm, a.task, a.question
