"""Draft trees: their links and masks, and the greedy walk that accepts a path.

A tree has n nodes, the root first and parents before children. Its links are [bs, n] int64:
`retrieve_index` is a node's row in the flat batch, `retrieve_next_token` its first child and
`retrieve_next_sibling` its parent's next child, both by number in the tree and -1 for none.
SGLang's own names of them, some spelled `retrive`, are kept.
"""

from torch import Tensor

QLEN_ONLY = 1
"""The tree mask mode in which a mask is [n, n] a request, without a part for the prefix."""


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Fill in positions [bs * n] and the links of trees that are given by tree_mask [bs * n * n]
    alone: mask[b, i, j] says that node j is i itself or an ancestor of it."""
    n = draft_token_num
    ancestors = tree_mask.view(batch_size, n, n).tril(-1)
    positions.view(batch_size, n)[:] = ancestors.sum(-1) + verified_seq_len.unsqueeze(1)
    for b, tree in enumerate(ancestors.tolist()):
        parents = [max((j for j in range(i) if row[j]), default=None) for i, row in enumerate(tree)]
        _link(b, parents, retrive_index, retrive_next_token, retrive_next_sibling)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill in all four, and tree_mask, of trees that a draft model grew.

    Its candidates are numbered in the order of drafting. selected_index [bs, n-1] has those that
    became nodes 1 to n-1. Candidate c was drafted with its topk siblings below candidate
    parent_list[c // topk], the first topk of them below the root.
    """
    if tree_mask_mode != QLEN_ONLY:
        raise NotImplementedError(f"the stand-in builds no trees with {tree_mask_mode=}")
    n = draft_token_num
    masks = tree_mask[: len(selected_index) * n * n].view(-1, n, n)
    masks.zero_()
    for b, selected in enumerate(selected_index.tolist()):
        node = {candidate: i for i, candidate in enumerate(selected, start=1)}
        parents: list[int | None] = [None]
        for candidate in selected:
            group = candidate // topk
            parents.append(node.get(int(parent_list[b, group])) if group else 0)
        _link(b, parents, retrive_index, retrive_next_token, retrive_next_sibling)
        for i, parent in enumerate(parents):
            if parent is not None:
                masks[b, i] = masks[b, parent]
            masks[b, i, i] = True
        masks[b, :, 0] = True
        positions[b * n : (b + 1) * n] = masks[b].sum(-1) - 1 + verified_seq_len[b]


def _link(
    b: int,
    parents: list[int | None],
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
) -> None:
    n = len(parents)
    first_child, next_sibling = [-1] * n, [-1] * n
    for i in reversed(range(n)):
        if (parent := parents[i]) is not None:
            next_sibling[i], first_child[parent] = first_child[parent], i
    for links, values in (
        (retrive_index, list(range(b * n, (b + 1) * n))),
        (retrive_next_token, first_child),
        (retrive_next_sibling, next_sibling),
    ):
        links[b] = links.new_tensor(values)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree down to the child whose token the target predicts while there is one.

    candidates and target_predict are [bs, n]: the nodes' tokens and the target's choices after
    them. accept_index [bs, most] gets the flat rows of the path, root included, accept_token_num
    [bs] its length without the root, and predicts [bs * n] the target's choice at each of its rows.
    """
    tokens, targets = candidates.tolist(), target_predict.view(candidates.shape).tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    most = accept_index.shape[1]
    for b in range(len(tokens)):
        path = [0]
        while len(path) < most:
            child = children[b][path[-1]]
            while child >= 0 and tokens[b][child] != targets[b][path[-1]]:
                child = siblings[b][child]
            if child < 0:
                break
            path.append(child)
        rows = retrive_index[b, path]
        accept_index[b, : len(path)] = rows.to(accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts[rows] = target_predict.view(candidates.shape)[b, path].to(predicts.dtype)
