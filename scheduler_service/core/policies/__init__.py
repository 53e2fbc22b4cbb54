"""Scheduling policies: in which order requests are served.

    policy.py    Policy, the interface; in the order of arrival; by priority
    fair.py      equal shares, or weighted ones, for all tenants

A model has one policy object, which may keep what it needs to know about that model's requests.
"""

from collections.abc import Mapping

from scheduler_service.core.config import PolicyName
from scheduler_service.core.policies.fair import Fair
from scheduler_service.core.policies.policy import Policy, Priority

POLICIES: Mapping[PolicyName, type[Policy]] = {
    PolicyName.FCFS: Policy,
    PolicyName.PRIORITY: Priority,
    PolicyName.FAIR: Fair,
}

__all__ = ["POLICIES", "Policy"]
