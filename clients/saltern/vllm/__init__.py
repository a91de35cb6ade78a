"""vLLM's KV connector for Saltern. Nothing here imports vLLM or torch until the engine asks for the connector.

Configure the engine with ``kv_connector="SalternConnector"`` and
``kv_connector_module_path="saltern.vllm.connector"``; docs/vllm.md has the rest.
"""
