"""Clients of a topology's discovery (files, etcd, Kubernetes) and event plane (NATS).

Owns the registries of workers, the credentials of etcd and NATS, the plan stored in etcd, and the checks of both
services. Starts neither of them and no process of a topology (``launch`` does); Dynamo's own runtime has its own
clients. Entry points: :class:`~trtx.planes.registry.Registry` and its three implementations,
:class:`~trtx.planes.etcd.Etcd` and :func:`~trtx.planes.credentials.secret_environment`. Always holds: every request
ends within its timeout, and no message and no ``repr`` contains a secret.
"""
