"""Filters, sorting and pages of trials, by any field."""

import pytest

from service import fields
from service.problems import Problem


def row(number, **config):
    base = dict.fromkeys(fields.ROW_FIELDS)
    return {
        **base,
        "id": f"r_{number:05d}",
        "number": number,
        "config": config,
        "summary": {"final_loss": -number},
    }


ROWS = [
    row(0, model={"norm": {"name": "layer", "eps": 1e-5}, "causal": True}, lr=0.01),
    row(1, model={"norm": {"name": "rms"}, "causal": False}, lr=0.1),
    row(2, model={"norm": {"name": "rms"}, "causal": True}, lr=None),
]


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        (["norm:rms"], [1, 2]),
        (["model.norm:rms"], [1, 2]),
        (["norm.eps:0.00001"], [0]),
        (["eps:1e-5"], [0]),
        (["lr:1e-2"], [0]),
        (["causal:true"], [0, 2]),
        (["norm:rms", "causal:true"], [2]),
        (["lr:null"], [2]),
        (["number:1"], [1]),
        (["final_loss:-2"], [2]),
        (["norm:layer", "causal:false"], []),
    ],
)
def test_a_condition_means_what_it_says(where, numbers):
    assert [one["number"] for one in fields.matching(ROWS, where)] == numbers


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(Problem) as refusal:
        fields.matching(ROWS, ["nrom:rms"])
    (error,) = refusal.value.errors
    assert "did you mean 'norm'" in error.message
    assert "model.norm" in error.allowed


def test_trials_without_a_value_come_last_either_way():
    assert [one["number"] for one in fields.ordered(ROWS, "lr")] == [0, 1, 2]
    assert [one["number"] for one in fields.ordered(ROWS, "-lr")] == [1, 0, 2]
    assert [one["number"] for one in fields.ordered(ROWS, "-final_loss")] == [0, 1, 2]


def test_pages_cover_every_trial_once(client_of, store):
    store.add_run("r", seeds=3, steps=1)
    client = client_of(store)
    seen, cursor = [], None
    while True:
        query = {"limit": 5, "sort": "-seed"} | ({"cursor": cursor} if cursor else {})
        page = client.get("/runs/r/trials", params=query).json()
        seen += [(trial["seed"], trial["number"]) for trial in page["trials"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == page["total"] == 12
    assert [seed for seed, _ in seen] == sorted((seed for seed, _ in seen), reverse=True)


def test_only_the_chosen_fields_are_sent(client_of, store):
    store.add_run("r", steps=1)
    client = client_of(store)
    assert set(client.get("/runs/r/trials?fields=status,step").json()["trials"][0]) == {
        "id",
        "status",
        "step",
    }
    assert set(client.get("/runs?fields=status").json()["runs"][0]) == {"id", "status"}
    for path in ("/runs?fields=nonsense", "/runs/r/trials?fields=nonsense", "/runs/r/trials?sort=nonsense"):
        assert client.get(path).status_code == 422
    assert client.get("/runs/r/trials?cursor=nonsense").status_code == 422
