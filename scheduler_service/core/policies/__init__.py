"""Who is served first: the policies an operator can choose from.

    policy.py    Policy, the interface: what it is asked, and what it is told
    fcfs.py      in the order of arrival
    priority.py  lower numbers first; higher ones make room for them
    fair.py      equal shares, or weighted ones, for all tenants

A model has one policy object, which may keep what it needs to know about that model's requests.
"""

from collections.abc import Mapping

from scheduler_service.core.config import PolicyName
from scheduler_service.core.policies.fair import Fair
from scheduler_service.core.policies.fcfs import FirstComeFirstServed
from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.policies.priority import Priority

POLICIES: Mapping[PolicyName, type[Policy]] = {
    PolicyName.FCFS: FirstComeFirstServed,
    PolicyName.PRIORITY: Priority,
    PolicyName.FAIR: Fair,
}

__all__ = ["POLICIES", "Policy"]
