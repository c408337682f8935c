"""Made-up results, for tests of what is shown of them."""

from gradientmail_lightning.demo.results import Mark, Outcome, Point, Results


def outcome(seed: int, loss: float, marks: tuple[Mark, ...] = ()) -> Outcome:
    curve = tuple(Point(step, step / 10, loss + (100 - step) / 100) for step in range(0, 101, 20))
    return Outcome(seed, loss, 10.0, curve, {"a": 100, "b": 100}, commits=5, requests=60, bytes=10**6, marks=marks)


MARKS = (Mark("join", "c", 103, 30, 3.0), Mark("kill", "b", 102, 60, 6.0))
RESULTS = Results(
    alone=(outcome(0, 2.5), outcome(1, 2.7)),
    merged=(outcome(0, 2.0), outcome(1, 2.2)),
    churn=outcome(0, 1.9, MARKS),
    seconds=33.0,
)
