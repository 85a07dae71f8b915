"""The whole training: epochs of the teacher, then epochs of the student.

What the context gives out brings all else along: counters, hooks, numbers, validations, checkpoints, and, when the run
is resumed, the place at which it was.
"""

import torch
from torch.nn import functional

from pipeline import Context, optimize, stages


class Runner(stages.Runner):
    """Trains the phase ``teacher``, then ``student``, which imitates it (Hinton et al., 2015).

    Args:
        context: the run's.
        teacher_epochs: how many of the runner's epochs are the teacher's.
        temperature: how soft the scores are that the student imitates.
    """

    def __init__(self, context: Context, teacher_epochs: int, temperature: float) -> None:
        super().__init__(context)
        self.teacher_epochs, self.temperature = teacher_epochs, temperature

    def run(self, context: Context) -> None:
        teacher, student = context["model"]["teacher"], context["model"]["student"]
        for _ in context.epochs(self.teacher_epochs):
            for batch in context.batches(teacher):
                teacher.brain.fit_batch(batch)
        for _ in context.epochs():
            for points, _labels in context.batches(student):
                with torch.no_grad():
                    soft = (teacher.model(points) / self.temperature).softmax(dim=1)
                loss = functional.cross_entropy(student.model(points) / self.temperature, soft)
                optimize(loss, student.optim_schedulers)
