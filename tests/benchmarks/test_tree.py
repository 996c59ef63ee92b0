"""Trees of guesses, chosen and counted by hand."""

from benchmarks.tree import chain, tokens_per_step, tree

TEXT = [[0, 0], [1, 0], [1, 0], [0, 1], [-1, 0], [0, -1], [-1, -1]]


def test_a_chain_is_a_tree() -> None:
    # outputs 0 | 1 2 and 3 | 4 and 5 | 6
    assert chain(2) == {(0,), (0, 0)}
    assert tokens_per_step([TEXT], chain(2)) == 6 / 3
    assert tokens_per_step([TEXT], chain(0)) == 1.0


def test_nodes_are_chosen_by_how_often_they_are_right() -> None:
    assert tree([TEXT], 1) == {(0,)}
    assert tree([TEXT], 3) == {(0,), (1,), (1, 0)}
    assert tree([[[0, -1]]], 5) == {(0,)}  # no other node is ever right


def test_a_second_candidate_goes_on_where_the_first_is_wrong() -> None:
    text = [[1, 0], [0, 0], [0, 0], [0, 0], [-1, -1]]
    assert tokens_per_step([text], chain(2)) == 4 / 2
    assert tokens_per_step([text], frozenset({(0,), (1,), (1, 0)})) == 4 / 2
    assert tokens_per_step([[[1, 0], [0, 0], [0, 0], [-1, -1]]], frozenset({(1,), (1, 0)})) == 3 / 1
