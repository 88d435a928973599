"""Rules of state tracking: strings from hashes, and the state after each labelled step."""

from abc import ABC, abstractmethod
from functools import cached_property
from itertools import permutations
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attnbench.data.counters import hashed
from attnbench.evals.lib.task_data import ABSENT, integers_below
from attnbench.training.step import Batch

PLUS, MINUS, TIMES, OPEN, CLOSE = range(5)
"""Symbols of arithmetic, counted from the modulus on."""

NUMBERS, OPERATORS, SHAPE = range(3)
"""Purposes of a hash, as its first counter."""


class Strings(NamedTuple):
    tokens_BT: Tensor
    """ABSENT behind the end of a string."""
    states_BL: Tensor
    """Anything behind the end."""
    positions_BL: Tensor
    """Positions that the states are told at; 0 behind the end."""


class Rule(ABC):
    num_symbols: int
    num_states: int
    num_inputs: int
    """Smallest number of different symbols of a step: bounds the number of strings."""

    chance: float
    """Accuracy of always saying the most frequent state."""

    takes_equals: ClassVar[bool] = False
    """An equals sign asks for the answer, where the last step alone is labelled: symbol `num_symbols`."""

    @abstractmethod
    def strings(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Strings:
        """Make strings of `length_B` steps, each a function of its hash, with room for `longest`."""

    def tokens(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Tensor:
        return self.strings(hash_B, length_B, longest).tokens_BT


class PermutationRule(Rule):
    """Permutations one after another; the state is their product, s_t = x_t ∘ s_{t-1} with (p ∘ q)[i] = p[q[i]]. A
    permutation's number is its place in the group's sorted list."""

    def __init__(self, degree: int, *, even: bool = False, most_moved: int | None = None) -> None:
        """Make the group of `degree` points, or its even half; inputs move at most `most_moved` points."""
        self.elements = [p for p in permutations(range(degree)) if not even or _is_even(p)]
        moved = [sum(image != point for point, image in enumerate(p)) for p in self.elements]
        self.inputs = [n for n, count in enumerate(moved) if most_moved is None or count <= most_moved]
        self.num_symbols = self.num_states = len(self.elements)
        self.num_inputs = len(self.inputs)
        self.chance = 1 / self.num_states

    @cached_property
    def table(self) -> Tensor:
        """Number of x ∘ s by the numbers of s and x."""
        number = {element: n for n, element in enumerate(self.elements)}
        return torch.tensor([[number[tuple(x[i] for i in s)] for x in self.elements] for s in self.elements])

    def strings(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Strings:
        # Every position has a label.
        column_L, table = torch.arange(longest, device=hash_B.device), self.table.to(hash_B.device)
        tokens_BL = self.tokens(hash_B, length_B, longest)
        is_step_BL = column_L < length_B[:, None]
        # Products of the last 1, 2, 4, ... permutations, then of all.
        states_BL, reach = tokens_BL.where(is_step_BL, 0), 1
        while reach < longest:
            products_BL = table[states_BL[:, :-reach], states_BL[:, reach:]]
            states_BL, reach = torch.cat([states_BL[:, :reach], products_BL], 1), 2 * reach
        return Strings(tokens_BL, states_BL, column_L.where(is_step_BL, 0))

    def tokens(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Tensor:
        device = hash_B.device
        column_L, inputs_X = torch.arange(longest, device=device), torch.tensor(self.inputs, device=device)
        tokens_BL = inputs_X[integers_below(hashed(hash_B[:, None], NUMBERS, column_L), self.num_inputs)]
        return tokens_BL.where(column_L < length_B[:, None], ABSENT)


class ArithmeticRule(Rule):
    """Numbers with +, - or × between them, × binding first; the state is the value so far, modulo `modulus`."""

    takes_equals = True

    def __init__(self, modulus: int) -> None:
        self.num_states = self.num_inputs = self.modulus = modulus
        self.num_symbols = modulus + TIMES + 1
        self.chance = 1 / modulus

    def strings(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Strings:
        # Numbers stand at even positions and have the labels.
        column_L = torch.arange(longest, device=hash_B.device)
        number_BL, operator_BL = self._symbols(hash_B, longest)
        sum_B, product_B, states = torch.zeros_like(hash_B), number_BL[:, 0], [number_BL[:, 0]]
        for step in range(1, longest):
            # The last product may still grow; the sum before it no longer changes.
            operator_B, number_B = operator_BL[:, step - 1], number_BL[:, step]
            is_times_B = operator_B == TIMES
            sum_B = sum_B.where(is_times_B, (sum_B + product_B) % self.modulus)
            signed_B = number_B.where(operator_B == PLUS, -number_B)
            product_B = torch.where(is_times_B, product_B * number_B, signed_B) % self.modulus
            states.append((sum_B + product_B) % self.modulus)
        position_BL = (2 * column_L).where(column_L < length_B[:, None], 0)
        return Strings(self.tokens(hash_B, length_B, longest), torch.stack(states, 1), position_BL)

    def tokens(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Tensor:
        number_BL, operator_BL = self._symbols(hash_B, longest)
        tokens_BT = torch.stack([number_BL, self.modulus + operator_BL], dim=2).flatten(1)[:, :-1]
        is_token_BT = torch.arange(2 * longest - 1, device=hash_B.device) < 2 * length_B[:, None] - 1
        return tokens_BT.where(is_token_BT, ABSENT)

    def _symbols(self, hash_B: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        column_L = torch.arange(longest, device=hash_B.device)
        number_BL = integers_below(hashed(hash_B[:, None], NUMBERS, column_L), self.modulus)
        return number_BL, integers_below(hashed(hash_B[:, None], OPERATORS, column_L), TIMES + 1)


class BracketRule(Rule):
    """Two operands in brackets with +, - or × between them, each a number or such brackets again; all trees of as many
    brackets are equally likely. The state at each closing bracket is its value, modulo `modulus`."""

    takes_equals = True
    chance = 0.27
    """Modulo 5: products make 0 the most frequent value."""

    def __init__(self, modulus: int) -> None:
        self.num_states = self.num_inputs = self.modulus = modulus
        self.num_symbols = modulus + CLOSE + 1

    def strings(self, hash_B: Tensor, length_B: Tensor, longest: int) -> Strings:
        # n pairs of brackets take 4n + 1 positions.
        num_rows, device = len(hash_B), hash_B.device
        row_B, zero_B = torch.arange(num_rows, device=device), torch.zeros_like(hash_B)
        # Of each open bracket the left operand, the operator (ABSENT before it) and one place more, for the root.
        left_BD = torch.zeros(num_rows, longest + 1, dtype=torch.long, device=device)
        operator_BD = torch.full_like(left_BD, ABSENT)
        tokens_BT = torch.full((num_rows, 4 * longest + 1), ABSENT, device=device)
        # One column past the end takes everything without a label.
        states_BL, positions_BL = torch.zeros(2, num_rows, longest + 1, dtype=torch.long, device=device)
        depth_B, value_B, told_B = zero_B, zero_B, zero_B
        to_open_B, awaited_B = length_B, torch.ones_like(hash_B)
        wants_operand_B = torch.ones(num_rows, dtype=torch.bool, device=device)
        for position in range(4 * longest + 1):
            # With r brackets and e operands to come, r (e + 1) of e (2r + e - 1) ways to go on open a bracket.
            ways_B = (awaited_B * (2 * to_open_B + awaited_B - 1)).clamp(min=1)
            chance_B = integers_below(hashed(hash_B, SHAPE, position), ways_B)
            opens_B = wants_operand_B & (chance_B < to_open_B * (awaited_B + 1))
            is_number_B = wants_operand_B & ~opens_B
            left_B, operator_B = left_BD[row_B, depth_B], operator_BD[row_B, depth_B]
            goes_on_B = ~wants_operand_B & (depth_B > 0)
            is_operator_B, closes_B = goes_on_B & (operator_B == ABSENT), goes_on_B & (operator_B != ABSENT)

            number_B = integers_below(hashed(hash_B, NUMBERS, position), self.modulus)
            new_operator_B = integers_below(hashed(hash_B, OPERATORS, position), TIMES + 1)
            token_B = number_B.where(is_number_B, self.modulus + OPEN).where(
                ~is_operator_B, self.modulus + new_operator_B
            )
            token_B = token_B.where(~closes_B, self.modulus + CLOSE)
            tokens_BT[:, position] = token_B.where(wants_operand_B | goes_on_B, ABSENT)

            sum_B = torch.where(operator_B == PLUS, left_B + value_B, left_B - value_B)
            closed_B = torch.where(operator_B == TIMES, left_B * value_B, sum_B) % self.modulus
            left_BD[row_B, depth_B] = value_B.where(is_operator_B, left_B)
            value_B = number_B.where(is_number_B, value_B).where(~closes_B, closed_B)
            label_B = told_B.where(closes_B, longest)
            states_BL[row_B, label_B], positions_BL[row_B, label_B] = value_B, position
            operator_BD[row_B, depth_B] = new_operator_B.where(is_operator_B, operator_B)
            depth_B = depth_B + opens_B.long() - closes_B.long()
            operator_BD[row_B, depth_B] = operator_BD[row_B, depth_B].where(~opens_B, ABSENT)
            told_B, to_open_B = told_B + closes_B, to_open_B - opens_B.long()
            awaited_B = awaited_B + opens_B.long() - is_number_B.long()
            wants_operand_B = opens_B | is_operator_B
        return Strings(tokens_BT, states_BL[:, :-1], positions_BL[:, :-1])


def labelled(rule: Rule, strings: Strings, length_B: Tensor, *, answer_alone: bool, first: int | None) -> Batch:
    """Label each step, or the last alone; `first` is a symbol that begins every string, or None."""
    tokens_BT, states_BL, positions_BL = strings
    is_label_BL = torch.arange(states_BL.shape[1], device=length_B.device) < length_B[:, None]
    if answer_alone:
        last_B1 = length_B[:, None] - 1
        states_BL, positions_BL, is_label_BL = (x.gather(1, last_B1) for x in (states_BL, positions_BL, is_label_BL))
        if rule.takes_equals:
            positions_BL = positions_BL + 1
            tokens_BT = functional.pad(tokens_BT, (0, 1), value=ABSENT).scatter(1, positions_BL, rule.num_symbols)
    if first is not None:
        tokens_BT, positions_BL = functional.pad(tokens_BT, (1, 0), value=first), positions_BL + is_label_BL
    # Symbol 0 fills the end, which no earlier position can see.
    return Batch(
        tokens_BT.where(tokens_BT != ABSENT, 0), states_BL.where(is_label_BL, 0), is_label_BL.float(), positions_BL
    )


def _is_even(permutation: tuple[int, ...]) -> bool:
    inversions = sum(a > b for n, a in enumerate(permutation) for b in permutation[n + 1 :])
    return inversions % 2 == 0


MODULUS = 5

RULES: dict[str, Rule] = {
    "parity": PermutationRule(2),
    "mod_arithmetic": ArithmeticRule(MODULUS),
    "mod_arithmetic_brackets": BracketRule(MODULUS),
    "s3": PermutationRule(3),
    "s4": PermutationRule(4),
    "a5": PermutationRule(5, even=True),
    "s5": PermutationRule(5),
    "s5_swaps": PermutationRule(5, most_moved=2),
}
"""Kinds of strings by name; parity is the group of two points, whose permutation 1 exchanges them."""
