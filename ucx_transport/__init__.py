"""Blocks over UCX: RDMA where there is a fabric, TCP elsewhere. Optional, by entry point."""
