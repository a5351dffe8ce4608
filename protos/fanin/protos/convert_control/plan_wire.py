"""Wire form of Plans (``plan.proto``)."""

import math

from fanin.protos.convert import codec_from_proto, codec_to_proto, training_from_proto, training_to_proto
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.v1 import plan_pb2


def plan_to_proto(plan: Plan) -> plan_pb2.Plan:
    return plan_pb2.Plan(
        name=plan.name,
        cohort=plan_pb2.Cohort(
            concurrency=plan.cohort.concurrency,
            buffer=plan.cohort.buffer,
            quorum=plan.cohort.quorum,
            deadline_s=plan.cohort.deadline_s,
            min_report_s=plan.cohort.min_report_s if math.isfinite(plan.cohort.min_report_s) else 0.0,
        ),
        training=training_to_proto(plan.training),
        codec=codec_to_proto(plan.codec),
        aggregation=plan_pb2.Aggregation(
            max_examples=plan.aggregation.max_examples,
            outer_learning_rate=plan.aggregation.outer_learning_rate,
            max_staleness=plan.aggregation.max_staleness,
        ),
        stop=plan_pb2.Stop(
            max_rounds=plan.stop.max_rounds,
            patience=plan.stop.patience,
            min_delta=plan.stop.min_delta,
            max_int8_drop=plan.stop.max_int8_drop,
        ),
    )


def plan_from_proto(message: plan_pb2.Plan) -> Plan:
    return Plan(
        name=message.name,
        cohort=CohortPlan(
            concurrency=message.cohort.concurrency,
            buffer=message.cohort.buffer,
            quorum=message.cohort.quorum,
            deadline_s=message.cohort.deadline_s,
            min_report_s=message.cohort.min_report_s or math.inf,
        ),
        training=training_from_proto(message.training),
        codec=codec_from_proto(message.codec),
        aggregation=AggregationPlan(
            max_examples=message.aggregation.max_examples,
            outer_learning_rate=message.aggregation.outer_learning_rate,
            max_staleness=message.aggregation.max_staleness,
        ),
        stop=StopPlan(
            max_rounds=message.stop.max_rounds,
            patience=message.stop.patience,
            min_delta=message.stop.min_delta,
            max_int8_drop=message.stop.max_int8_drop,
        ),
    )
