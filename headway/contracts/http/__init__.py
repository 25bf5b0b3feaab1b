"""HTTP interface, by noun: paths, who may call them, requests and responses.

Control is JSON; trajectories travel as `codec` payloads. Bodies that fail raise the classes of
`errors`. Times are seconds.
"""
