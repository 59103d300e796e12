"""What the processes of a topology meet over: discovery (files, etcd, Kubernetes) and events (NATS), seen as a client.

Owns the registries of workers, the credentials of etcd and NATS, a plan that is kept in etcd, and what makes either
unfit. Starts neither of them and no process of a topology (``launch`` does); what Dynamo's own runtime says to them is
Dynamo's. Enter through :class:`~trtx.planes.registry.Registry` and its three kinds, :class:`~trtx.planes.etcd.Etcd` and
:func:`~trtx.planes.credentials.secret_environment`.
Always holds: each question ends within its time, and no message and no ``repr`` holds a secret.
"""
