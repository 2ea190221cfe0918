"""A Ray cluster on this machine, in a process of its own: nothing of Ray gets into the process of a test.

All nodes but the first claim to have a GPU. Prints its addresses and nodes as a line of JSON. Ends with its standard
input. A line there is the number of a node to kill, which a line answers when that is done.
"""

import json
import os
import socket
import sys
from contextlib import closing

import ray
from ray.cluster_utils import Cluster
from ray.util.client.server.server import serve


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(nodes: int) -> None:
    port = free_port()
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    head = {**small, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    own = [cluster.head_node, *(cluster.add_node(**small, num_gpus=1) for _ in range(nodes - 1))]
    cluster.wait_for_nodes()
    # Not by the head, which forks a process for each client: sometimes gRPC ends that one, and a client waits for half
    # a minute until it tries again.
    served = serve(
        "127.0.0.1", port, ray_connect_handler=lambda *_, **__: ray.init(cluster.address, ignore_reinit_error=True)
    )
    said = {"address": cluster.address, "client": f"ray://127.0.0.1:{port}", "nodes": [node.node_id for node in own]}
    os.write(3, (json.dumps(said) + "\n").encode())
    for line in sys.stdin:
        cluster.remove_node(own[int(line)], allow_graceful=False)
        os.write(3, b"{}\n")
    served.stop(0)
    ray.shutdown()
    cluster.shutdown()
    os._exit(0)


if __name__ == "__main__":
    os.dup2(1, 3)
    os.dup2(2, 1)
    main(int(sys.argv[1]))
