"""What a cache group has and has found, in words: the same in commands and on the dashboard."""

from pagewire.v1.status_pb2 import CacheGroupStatus


def describe_cache_group(group: CacheGroupStatus) -> tuple[str, str]:
    """Its name, and its use: blocks or states of sequences, what the prefix cache has, and the
    share of the tokens looked up so far that was found."""
    on_host = f", {group.num_host_cached} on the host" if group.num_host_cached else ""
    found = "nothing looked up"
    if group.num_queried_tokens:
        found = f"{100 * group.num_found_tokens // group.num_queried_tokens} % of tokens found"
    if not group.num_state_blocks:
        name = f"{group.lifetime}, {group.block_tokens} tokens a block"
        used = f"{group.num_used_blocks} blocks in use, {group.num_cached} cached"
    else:
        name = f"{group.lifetime}, {group.num_state_blocks} blocks each"
        num_states = group.num_used_blocks // group.num_state_blocks
        used = f"{num_states} in use, {group.num_cached} saved"
    return name, f"{used}{on_host}, {found}"
