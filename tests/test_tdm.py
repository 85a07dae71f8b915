"""The example ``tdm``: its tree, what is drawn from it and found in it, and how its startup stage loads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.errors import DataError
from pipeline.workspaces import package_name

FOLDER = Path(__file__).parents[1] / "workspace_examples" / "tdm"
build_tree, data, model, tree = (
    import_module(f"{package_name(FOLDER)}.{name}") for name in ("build_tree", "data", "model", "tree")
)
SIZES = [5, 8, 9, 13, 64, 100]
Train = Callable[..., Context]

WORKSPACE = """
    import torch
    from torch.utils.data import TensorDataset
    from pipeline import EngineMode, stages

    def views():
        random = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(0, 14, (8, 3), generator=random), torch.randint(0, 13, (8,), generator=random))

    class Cluster(stages.Instance):
        def instance(self, context):
            super().instance(context)
            context["engine"] = EngineMode.CLUSTER
"""


def tables_of(items: int) -> Any:
    return build_tree.build(torch.randn(items, 4, generator=torch.Generator().manual_seed(items)))


def tree_of(items: int) -> Any:
    made = tree.Tree(items)
    made.arrange(tables_of(items))
    return made


# The tree


@pytest.mark.parametrize("items", SIZES)
def test_each_leaf_is_one_item_and_all_layers_above_the_leaves_are_full(items: int) -> None:
    tables = tables_of(items)
    *above, leaves = [layer.tolist() for layer in tables.layers]
    assert [len(layer) for layer in above] == [2**depth for depth in range(1, len(above) + 1)]
    assert 2 ** len(above) < items == len(leaves) <= 2 ** (len(above) + 1)
    assert tables.info[leaves, 0].sort().values.tolist() == list(range(1, items + 1))
    assert not tables.info[sum(above, [0, 1]), 0].any()


@pytest.mark.parametrize("items", SIZES)
def test_the_way_to_each_item_follows_the_parents_of_the_table_of_nodes(items: int) -> None:
    tables = tables_of(items)
    for item, way in enumerate(tables.travel.tolist()):
        assert tables.info[way[-1], 0] == item + 1
        assert tables.info[way, 2].tolist() == [1, *way[:-1]]
        assert [node in layer.tolist() for node, layer in zip(way, tables.layers, strict=True)] == [True] * len(way)


@pytest.mark.parametrize("items", SIZES)
def test_the_children_of_a_node_are_the_nodes_that_have_it_as_their_parent(items: int) -> None:
    info = tables_of(items).info.tolist()
    for node in range(1, len(info)):
        expected = [child for child in range(2, len(info)) if info[child][2] == node]
        assert [child for child in info[node][3:] if child] == expected
        assert [info[child][1] for child in expected] == [info[node][1] + 1] * len(expected)


def test_items_that_are_alike_share_the_upper_nodes() -> None:
    place, noise = torch.arange(16) % 4, 0.01 * torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    corners = torch.tensor([[0.0, 0.0], [0.0, 9.0], [20.0, 0.0], [20.0, 9.0]])
    upper = build_tree.build(corners[place] + noise).travel[:, 1]
    assert [len(set(upper[place == corner].tolist())) for corner in range(4)] == [1, 1, 1, 1]
    assert len(set(upper.tolist())) == 4


def test_an_inner_node_has_the_mean_of_the_vectors_of_the_items_below_it() -> None:
    vectors, tables = torch.randn(13, 4), tables_of(13)
    nodes = build_tree.node_vectors(vectors, tables.travel, len(tables.info))
    for node in range(2, len(nodes)):
        below = (tables.travel == node).any(dim=1)
        torch.testing.assert_close(nodes[node], vectors[below].mean(dim=0))


# Sampling and search


@pytest.mark.parametrize("items", [5, 13])
def test_sampling_draws_all_other_nodes_of_a_layer_alike_and_never_the_one_on_the_way(items: int) -> None:
    torch.manual_seed(0)
    made, item = tree_of(items), items // 2
    counts = [500] * len(made.sizes)
    nodes, labels = made.sample(torch.tensor([item]), counts)
    way = made.travel[item].tolist()
    assert nodes[labels == 1].tolist() == way
    for own, layer, drawn in zip(way, tables_of(items).layers, nodes[labels == 0].split(counts), strict=True):
        others = [node for node in layer.tolist() if node != own]
        shares = {node: (drawn == node).float().mean().item() for node in others}
        assert sum(shares.values()) == pytest.approx(1)
        assert list(shares.values()) == pytest.approx([1 / len(others)] * len(others), abs=0.1)


@pytest.mark.parametrize("items", SIZES)
def test_a_beam_as_wide_as_the_last_layer_finds_each_item_with_its_score(items: int) -> None:
    made, scores = tree_of(items), torch.randn(3, 4 * items)
    leaves, found = made.search(lambda nodes: scores.gather(1, nodes), 3, items)
    for row in range(3):
        by_leaf = {leaf: score for leaf, score in zip(leaves[row].tolist(), found[row].tolist(), strict=True) if leaf}
        assert by_leaf == {leaf: scores[row, leaf].item() for leaf in made.leaves.tolist()}


def test_a_narrow_beam_goes_on_from_the_best_nodes_of_each_layer_alone() -> None:
    made, scores = tree_of(13), torch.randn(1, 40)
    leaves, _ = made.search(lambda nodes: scores.gather(1, nodes), 1, 2)
    beam = [2, 3]
    for _ in made.sizes[1:]:
        beam = sorted(beam, key=lambda node: -scores[0, node].item())[:2]
        beam = [child for node in beam for child in made.info[node, 3:].tolist() if child]
    assert sorted(leaf for leaf in leaves[0].tolist() if leaf) == sorted(beam)


def test_a_search_as_wide_as_the_tree_scores_films_as_scoring_them_all_but_for_those_that_were_seen() -> None:
    torch.manual_seed(0)
    brain, history = model.Model(13, 4, 3, [1, 1, 1, 1], beam_width=13), torch.randint(0, 14, (5, 3))
    brain.tree.arrange(tables_of(13))
    seen = torch.rand(5, 13) < 0.3
    torch.testing.assert_close(brain.search(history, seen, 13), brain.score_all(history).masked_fill(seen, -torch.inf))


def test_a_new_tree_keeps_what_was_learnt_of_each_film() -> None:
    torch.manual_seed(0)
    brain, history = model.Model(13, 4, 3, [1, 1, 1, 1], beam_width=13), torch.randint(0, 14, (5, 3))
    brain.tree.arrange(tables_of(13))
    before, ways = brain.score_all(history), brain.tree.travel.clone()
    brain.rebuild_tree()
    torch.testing.assert_close(brain.score_all(history), before)
    assert not torch.equal(brain.tree.travel, ways)


# The stages


class Stopping:
    """A plugin that ends the run after an iteration."""

    at = 0

    @hookimpl
    def after_batch(self, context: Context) -> None:
        context["is_exit"] = context["train_state"]["iteration"] == self.at


@pytest.fixture
def train(workspace: Callable[..., Path], tmp_path: Path) -> Train:
    """Trains a small tree for a step that changes nothing; its context afterwards."""
    folder = workspace({"data.py": WORKSPACE})
    build_tree.write(tmp_path / "tree", torch.randn(13, 4, generator=torch.Generator().manual_seed(1)))
    names = {
        "layer": "layer_list.txt",
        "travel": "travel_list.txt",
        "info": "tree_info.txt",
        "emb": "tree_emb.pt",
    }

    def run(rate: float = 0.0, resume: str = "never", **runner: Any) -> Context:
        config = {
            "name": "tdm",
            "plugins": [Stopping],
            "workspace": str(folder),
            "hyper_parameters": {
                "optimizer": {"class": "SGD", "learning_rate": rate},
                "leaf_node_nums": 13, "node_emb_size": 4, "history": 3, "neg_sampling_list": [1, 1, 1, 1], "beam_width": 4,
            },
            "dataset": [{"name": "train_data", "class_path": "{workspace}/data.py:views", "batch_size": 4}],
            "phase": [{"name": "tdm", "model": f"{FOLDER}/model.py", "dataset_name": "train_data"}],
            "runner": [{
                "name": "train_runner", "class": "single_train", "device": "cpu", "epochs": 1,
                "startup_class_path": f"{FOLDER}/tdm_startup.py",
                "startup_args": {f"tree_{key}_path": str(tmp_path / "tree" / name) for key, name in names.items()},
                **runner,
            }],
        }  # fmt: skip
        context: Context = GeneralTrainer(config, resume=resume).run()
        return context

    return run


def state_of(context: Context) -> dict[str, Tensor]:
    state: dict[str, Tensor] = context["model"]["tdm"]["brain"].modules.state_dict()
    return state


def numbers_of(path: Path) -> list[list[int]]:
    return [[int(number) for number in line.split(",")] for line in path.read_text().splitlines()]


def test_a_single_process_loads_what_the_four_files_say(train: Train, tmp_path: Path) -> None:
    state, folder = state_of(train()), tmp_path / "tree"
    assert state["tree.layers"].tolist() == list(chain.from_iterable(numbers_of(folder / "layer_list.txt")))
    assert state["tree.travel"].tolist() == numbers_of(folder / "travel_list.txt")
    assert state["tree.info"].tolist() == numbers_of(folder / "tree_info.txt")
    assert torch.equal(
        state["scorer.embeddings.weight"], torch.load(folder / "tree_emb.pt", weights_only=True)["weight"]
    )


def test_a_process_of_a_cluster_takes_the_tree_alone_from_the_checkpoint(train: Train, tmp_path: Path) -> None:
    first = train(seed=1)
    checkpoint = first["checkpointer"].newest()
    for file in (tmp_path / "tree").iterdir():
        file.unlink()
    saved, fresh = state_of(first), model.Model(13, 4, 3, [1, 1, 1, 1], 4).modules.state_dict()
    cluster = {"instance_class_path": "{workspace}/data.py:Cluster", "init_model_path": str(checkpoint), "seed": 2}
    loaded = state_of(train(**cluster))
    same = {name for name, tensor in loaded.items() if torch.equal(tensor, saved[name])}
    assert same - {"scorer.bias.weight", "scorer.recency"} == {
        "tree.layers", "tree.travel", "tree.info", "scorer.embeddings.weight",
    }  # fmt: skip
    assert fresh.keys() == loaded.keys()


def test_a_process_of_a_cluster_without_a_checkpoint_takes_the_tree_of_the_files(train: Train) -> None:
    of_one, of_cluster = state_of(train()), state_of(train(instance_class_path="{workspace}/data.py:Cluster"))
    assert all(torch.equal(tensor, of_one[name]) for name, tensor in of_cluster.items())


def test_a_model_to_begin_with_brings_its_tree_along(train: Train, tmp_path: Path) -> None:
    first = train(seed=1)
    build_tree.write(tmp_path / "tree", torch.randn(13, 4))
    loaded = state_of(train(init_model_path=str(first["checkpointer"].newest()), seed=2))
    assert all(torch.equal(tensor, state_of(first)[name]) for name, tensor in loaded.items())


def test_a_missing_file_of_the_tree_is_named_with_the_command_that_makes_it(train: Train, tmp_path: Path) -> None:
    (tmp_path / "tree" / "tree_info.txt").unlink()
    with pytest.raises(DataError, match=r"tree_info.txt: is not there; run `python build_tree.py .+/tree`"):
        train()


@pytest.mark.parametrize("at", [2, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 3, 4, 5))])
def test_a_training_by_turns_that_is_resumed_ends_with_the_tree_and_the_weights_of_one_that_is_not(
    train: Train, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = {"rate": 1.0, "epochs": 3, "runner_class_path": f"{FOLDER}/runner.py:JointTraining"}
    turns["runner_args"] = {"tree_interval": 1}
    straight = train(**turns)
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "at", at)
        assert train(**turns)["train_state"]["iteration"] == at
    resumed = train(**turns, resume="auto")
    assert resumed["train_state"] == straight["train_state"]
    assert all(torch.equal(tensor, state_of(straight)[name]) for name, tensor in state_of(resumed).items())


def test_a_new_tree_is_built_after_each_interval_but_the_last(train: Train, tmp_path: Path) -> None:
    first = numbers_of(tmp_path / "tree" / "travel_list.txt")
    turns = {"rate": 1.0, "runner_class_path": f"{FOLDER}/runner.py:JointTraining", "runner_args": {"tree_interval": 2}}
    assert state_of(train(**turns, epochs=2))["tree.travel"].tolist() == first
    assert state_of(train(**turns, epochs=3))["tree.travel"].tolist() != first


@pytest.mark.slow
def test_the_command_writes_the_files_that_the_instance_stage_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(FOLDER / "build_tree.py"), str(tmp_path / "mine")], check=True)
    build_tree.write(tmp_path / "other", data.film_vectors(32))
    for file in (tmp_path / "other").iterdir():
        assert (tmp_path / "mine" / file.name).read_bytes() == file.read_bytes()


def test_a_damaged_file_of_the_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data.wheel_path().parent.mkdir(parents=True)
    data.wheel_path().write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"its SHA-256 is 41f0c27c\w+, not 9c994820\w+; delete this file and run again"):
        data.fetch()
